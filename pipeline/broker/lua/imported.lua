#!lua flags=allow-oom
-- One page is in the engine (or was given up): its payload, credit and header entry go; the next in line wakes.
-- Not fenced: every name carries the attempts, so a stale worker can only give back what is its own.
-- KEYS, ARGV 1-8 as budget.lua; ARGV 9 credit field, 10 entry id
-- returns 1 when this call gave the credit back, 0 when it was gone already
--@include budget
local id = ARGV[1]
redis.call('UNLINK', of(id, PAYLOAD_OF) .. ARGV[9])
redis.call('XDEL', of(id, STREAM_OF), ARGV[10])
if not give(id, ARGV[9]) then return 0 end
-- it waits for its own share, not in the line
if redis.call('HEXISTS', WANTS, id) == 1 and not redis.call('ZSCORE', WAITERS, id) then wake(id) end
wake_line()
return 1
