#!lua flags=allow-oom
-- Pages are in the engine (or were given up): their payloads, credits and header entries go; the next in line wakes.
-- Not fenced: every name carries the attempts, so a stale worker can only give back what is its own.
-- KEYS, ARGV 1-8 as budget.lua; ARGV 9.. credit field and entry id of each
-- returns how many credits this call gave back; the others were gone already
--@include budget
local id, given = ARGV[1], 0
for at = 9, #ARGV, 2 do
  redis.call('UNLINK', of(id, PAYLOAD_OF) .. ARGV[at])
  redis.call('XDEL', of(id, STREAM_OF), ARGV[at + 1])
  if give(id, ARGV[at]) then given = given + 1 end
end
if given == 0 then return 0 end
-- it waits for its own share, not in the line
if redis.call('HEXISTS', WANTS, id) == 1 and not redis.call('ZSCORE', WAITERS, id) then wake(id) end
wake_line()
return given
