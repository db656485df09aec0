#!lua flags=allow-oom
-- A replica leaves, or the janitor forgets one whose lease has ended. A name that another process holds stays.
-- KEYS 1 replica record, 2 set of names, 3 hash of drain wishes
-- ARGV 1 name, 2 incarnation of the caller
-- returns 1 for the caller that removed it, else 0
local holder = redis.call('HGET', KEYS[1], 'incarnation')
if holder and holder ~= ARGV[2] then return 0 end
redis.call('DEL', KEYS[1])
redis.call('HDEL', KEYS[3], ARGV[1])
return redis.call('SREM', KEYS[2], ARGV[1])
