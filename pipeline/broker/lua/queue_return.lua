#!lua flags=allow-oom
-- Put a job that was taken but not begun back to the front of its queue; whoever is second does nothing.
-- KEYS 1 RQ's list of jobs being handed out, 2 the queue
-- ARGV 1 job id
-- returns 1 when it was put back, else 0
if redis.call('LREM', KEYS[1], 1, ARGV[1]) == 0 then return 0 end
redis.call('LPUSH', KEYS[2], ARGV[1])
return 1
