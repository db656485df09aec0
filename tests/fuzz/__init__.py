"""Fuzzing: `python -m tests.fuzz` feeds millions of mutated frames, headers, payloads and job records to what reads
them, and compares whatever comes out with a judge of its own."""
