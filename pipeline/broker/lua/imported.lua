#!lua flags=allow-oom
-- Pages are in the engine (or were given up): their payloads, credits and header entries go; the next in line wakes.
-- Not fenced: every name carries the attempts, so a stale worker can only give back what is its own.
-- KEYS, ARGV 1-8 as budget.lua; ARGV 9.. credit field and entry id of each
-- returns how many credits this call gave back; the others were gone already
--@include budget
local id, prefix = ARGV[1], of(ARGV[1], PAYLOAD_OF)
local fields, payloads, entries = {}, {}, {}
for at = 9, #ARGV, 2 do
  fields[#fields + 1] = ARGV[at]
  payloads[#payloads + 1] = prefix .. ARGV[at]
  entries[#entries + 1] = ARGV[at + 1]
end
redis.call('UNLINK', unpack(payloads))
redis.call('XDEL', of(id, STREAM_OF), unpack(entries))
local given = give(id, fields)
if given == 0 then return 0 end
-- it waits for its own share, not in the line
if redis.call('HEXISTS', WANTS, id) == 1 and not redis.call('ZSCORE', WAITERS, id) then wake(id) end
wake_line()
return given
