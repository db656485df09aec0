"""Everything that talks to Redis/Valkey and RQ, and nothing else does."""
