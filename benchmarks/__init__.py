"""What the README quotes: this package beside the published one and beside plain SQL, on the same data, in the same
run. ``make bench`` and ``make bench-full`` measure; ``python -m benchmarks.report`` tells of it."""
