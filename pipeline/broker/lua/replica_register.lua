#!lua flags=allow-oom
-- A process takes (or takes again) a replica's name, unless another one holds it.
-- KEYS 1 replica record, 2 set of names
-- ARGV 1 name, 2 incarnation of the process, 3 replica (JSON), 4 stats (JSON), 5 load (JSON), 6 lease in ms
-- returns 0 when registered, else the ms that the other process's lease still has
local holder = redis.call('HGET', KEYS[1], 'incarnation')
if holder and holder ~= ARGV[2] then return math.max(1, redis.call('PTTL', KEYS[1])) end
redis.call('HSET', KEYS[1], 'incarnation', ARGV[2], 'replica', ARGV[3], 'stats', ARGV[4], 'load', ARGV[5])
redis.call('PEXPIRE', KEYS[1], ARGV[6])
redis.call('SADD', KEYS[2], ARGV[1])
return 0
