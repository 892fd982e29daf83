"""``python -m tsg`` is ``tsg``."""

from tsg.cli import main

main()
