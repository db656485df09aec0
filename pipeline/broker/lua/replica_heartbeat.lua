#!lua flags=allow-oom
-- Renew a replica's lease and its gauges. allow-oom: a full broker must not look like the death of all replicas.
-- KEYS 1 replica record, 2 hash of drain wishes
-- ARGV 1 incarnation of the process, 2 stats (JSON), 3 load (JSON), 4 lease in ms, 5 name
-- returns "ok", "drain" (ok, and an operator wants it to take nothing new), "gone" (the lease has ended) or "taken"
-- (another process has the name)
local holder = redis.call('HGET', KEYS[1], 'incarnation')
if not holder then return 'gone' end
if holder ~= ARGV[1] then return 'taken' end
redis.call('HSET', KEYS[1], 'stats', ARGV[2], 'load', ARGV[3])
redis.call('PEXPIRE', KEYS[1], ARGV[4])
return redis.call('HGET', KEYS[2], ARGV[5]) == holder and 'drain' or 'ok'
