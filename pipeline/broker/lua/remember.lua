#!lua flags=allow-oom
-- Keep the trace of an ended handoff for operators, a bounded number of them.
-- KEYS 1 list; ARGV 1 trace (JSON), 2 how many to keep, 3 TTL in ms
redis.call('LPUSH', KEYS[1], ARGV[1])
redis.call('LTRIM', KEYS[1], 0, ARGV[2] - 1)
return redis.call('PEXPIRE', KEYS[1], ARGV[3])
