#!lua flags=allow-oom
-- From now on only this pair of attempts may write. Attempts only grow; what older ones left behind goes.
-- KEYS, ARGV 1-8 as budget.lua; ARGV 9 P attempt, 10 D attempt, 11 handoff ttl ms
-- returns "ok" | "stale" (a newer attempt of either side was here)
--@include budget
local id = ARGV[1]
local fence = redis.call('GET', of(id, FENCE_OF))
local attempts = ARGV[9] .. '.' .. ARGV[10]
if fence then
  local prefill, decode = string.match(fence, '(%d+)%.(%d+)')
  if tonumber(ARGV[9]) < tonumber(prefill) or tonumber(ARGV[10]) < tonumber(decode) then return 'stale' end
end
if fence ~= attempts then
  close(id)
  wake_line()
end
redis.call('SET', of(id, FENCE_OF), attempts, 'PX', ARGV[11])
return 'ok'
