"""The fault cases that are about processes and servers, by their numbers in docs/reliability.md."""
