#!lua flags=allow-oom
-- An operator wants a replica to take nothing new, or takes that wish back. It is for the process that has the name now.
-- KEYS 1 replica record, 2 hash of drain wishes
-- ARGV 1 name, 2 "1" or "0" (take it back)
-- returns 1, or 0 when no such replica is alive
local holder = redis.call('HGET', KEYS[1], 'incarnation')
if not holder then return 0 end
if ARGV[2] == '1' then redis.call('HSET', KEYS[2], ARGV[1], holder) else redis.call('HDEL', KEYS[2], ARGV[1]) end
return 1
