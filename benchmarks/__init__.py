"""What the README quotes: this package and the published one, on the same data, in the same run."""
