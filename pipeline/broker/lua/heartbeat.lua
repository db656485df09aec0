#!lua flags=allow-oom
-- The handoff's workers are alive: its credits keep their lease, its payloads and keys their time to live.
-- KEYS, ARGV 1-8 as budget.lua; ARGV 9 payload ttl ms, 10 handoff ttl ms
-- returns 1 when the handoff holds credit, 0 when it does not
--@include budget
local id = ARGV[1]
for _, pattern in ipairs({CREDITS_OF, STREAM_OF, FENCE_OF}) do redis.call('PEXPIRE', of(id, pattern), ARGV[10]) end
if not redis.call('ZSCORE', LEASES, id) then return 0 end
renew(id)
for _, field in ipairs(redis.call('HKEYS', of(id, CREDITS_OF))) do
  redis.call('PEXPIRE', of(id, PAYLOAD_OF) .. field, ARGV[9])
end
return 1
