"""The command line. One module per command, each with `add(subparsers)`; `pipeline.__main__` picks by name."""
