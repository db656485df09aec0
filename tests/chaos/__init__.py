"""Chaos: `python -m tests.chaos` hurts a running system at random, from one seed, while clients use it, and checks the
recorded history and the system's rest against the invariants of docs/reliability.md."""
