// Times that tell how long ago they are; without this they stand there as they are.
(() => {
  "use strict";

  const length = (seconds) => {
    const whole = Math.floor(seconds);
    const [days, hours, minutes] = [Math.floor(whole / 86400), Math.floor(whole / 3600) % 24, Math.floor(whole / 60) % 60];
    if (days) return `${days} d ${hours} h`;
    if (hours) return `${hours} h ${minutes} min`;
    return minutes ? `${minutes} min ${whole % 60} s` : `${whole} s`;
  };
  const rough = (seconds) => (seconds < 60 ? length(seconds) : length(seconds).replace(/ \d+ (s|min|h)$/, ""));
  const forms = {
    ago: (passed) => (passed < 0 ? `in ${rough(-passed)}` : passed < 5 ? "just now" : `${rough(passed)} ago`),
    for: (passed) => `for ${length(Math.max(0, passed))}`,
    left: (passed) => (passed < 0 ? `${length(-passed)} left` : `${length(passed)} over its time`),
  };

  const tell = () => {
    const now = Date.now() / 1000;
    for (const time of document.querySelectorAll("time[data-form]")) {
      const text = forms[time.dataset.form](now - Number(time.dataset.at));
      if (time.textContent !== text) time.textContent = text;
    }
  };
  document.addEventListener("tsg:changed", tell);
  tell();
  setInterval(tell, 1000);
})();
