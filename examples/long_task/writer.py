"""An agent that knows nothing of tsg: it does what its environment says, and leaves with 0 when it is done."""

from __future__ import annotations

import json
import os
import time

params = json.loads(os.environ["TSG_PARAMS"])
# Where a model would be asked.
time.sleep(0.2)
print(f"step {os.environ['TSG_STEP']}: {params['words']} words")
