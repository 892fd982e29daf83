// Asks about once a second for the page as it is now, and changes what has changed: an element that is the same stays,
// with its animation, its focus and where it was scrolled to.
(() => {
  "use strict";

  const root = document.documentElement;
  const lost = document.getElementById("lost");
  const here = location.pathname + location.search;
  let tag = null;
  let timer = null;
  let asking = false;

  const key = (node) => (node.nodeType === Node.ELEMENT_NODE ? node.id : "");

  const fitAttributes = (old, fresh) => {
    for (const { name } of [...old.attributes]) if (!fresh.hasAttribute(name)) old.removeAttribute(name);
    for (const { name, value } of fresh.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  };

  // Both are of one kind, and have the same key.
  const fit = (old, fresh) => {
    if (old.isEqualNode(fresh)) return;
    if (old.nodeType !== Node.ELEMENT_NODE) {
      old.data = fresh.data;
      return;
    }
    fitAttributes(old, fresh);
    if (old.localName === "progress") old.value = Number(fresh.getAttribute("value"));
    fitChildren(old, fresh);
  };

  const fitChildren = (old, fresh) => {
    const wanted = new Set([...fresh.children].map(key).filter(Boolean));
    const kept = new Map();
    for (const child of [...old.children]) {
      if (!key(child)) continue;
      if (wanted.has(child.id)) kept.set(child.id, child);
      else child.remove();
    }
    let at = old.firstChild;
    for (const child of fresh.childNodes) {
      const found = key(child) ? kept.get(child.id) : at;
      if (key(child) && found) {
        while (at && at !== found && !key(at)) {
          const next = at.nextSibling;
          at.remove();
          at = next;
        }
      }
      if (found && found.nodeName === child.nodeName && found.nodeType === child.nodeType && key(found) === key(child)) {
        if (found !== at) old.insertBefore(found, at);
        fit(found, child);
        at = found.nextSibling;
      } else {
        old.insertBefore(document.importNode(child, true), at);
      }
    }
    while (at) {
      const next = at.nextSibling;
      at.remove();
      at = next;
    }
  };

  const show = (text) => {
    const fresh = new DOMParser().parseFromString(text, "text/html");
    // Another release's style and scripts are not those that this page's policy lets in.
    if (fresh.documentElement.dataset.build !== root.dataset.build) {
      location.reload();
      return;
    }
    if (document.title !== fresh.title) document.title = fresh.title;
    fitChildren(document.getElementById("main"), fresh.getElementById("main"));
    document.dispatchEvent(new Event("tsg:changed"));
  };

  const ask = async () => {
    const headers = tag === null ? {} : { "If-None-Match": tag };
    const answer = await fetch(here, { headers, cache: "no-store", signal: AbortSignal.timeout(5000) });
    if (answer.status === 304) return;
    if (answer.status !== 200 && answer.status !== 404) throw new Error("no page");
    const text = await answer.text();
    show(text);
    tag = answer.headers.get("ETag");
  };

  const go = async () => {
    if (asking) return;
    clearTimeout(timer);
    asking = true;
    try {
      await ask();
      lost.hidden = true;
    } catch {
      lost.hidden = false;
    }
    asking = false;
    timer = setTimeout(go, 1000);
  };

  document.addEventListener("visibilitychange", () => {
    if (!document.hidden) go();
  });
  timer = setTimeout(go, 1000);
})();
