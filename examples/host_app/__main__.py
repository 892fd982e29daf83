"""``python -m host_app``: the service, until SIGTERM or Ctrl-C."""

from __future__ import annotations

import uvicorn

from host_app.app import create_app
from host_app.config import Config


def main() -> None:
    config = Config.from_environment()
    uvicorn.run(create_app(config), host=config.host, port=config.port, log_level="warning")


if __name__ == "__main__":
    main()
