"""A plan to look at: a page in one file, or a small server that shows every plan, live. Nothing here changes a plan.

What is shown is read in :mod:`tsg.cockpit.scene`, turned into HTML in :mod:`tsg.cockpit.render`, and goes to a file by
:mod:`tsg.cockpit.file` or to a browser by :mod:`tsg.cockpit.server`. The last three need the extra ``cockpit``.
"""

from __future__ import annotations

__all__: list[str] = []
