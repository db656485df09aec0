#!lua flags=allow-oom
-- Every handoff whose credit lease ended is closed; its workers will find the fence gone.
-- KEYS, ARGV 2-8 as budget.lua
-- returns the ids, sorted
--@include budget
local ids = redis.call('ZRANGEBYSCORE', LEASES, '-inf', string.format('%.0f', now))
table.sort(ids)
for _, id in ipairs(ids) do close(id) end
wake_line()
return ids
