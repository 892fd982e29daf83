"""A small order service with the task ledger in its own database: see README.md."""
