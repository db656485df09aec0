#!lua
-- Ask for the right to put values in flight, in order; idempotent per credit. Not allow-oom: at maxmemory nothing new
-- begins.
-- KEYS, ARGV 1-8 as budget.lua; KEYS 7 arrivals
-- ARGV 9 attempts "p.d", 10 bytes of each, 11 budget bytes, 12 share divisor, 13 handoff ttl ms,
--      14.. credit fields "p.d.sequence"
-- returns {how many of the leading fields are granted,
--          "granted" (all of them) | "wait" | "refused" (larger than the budget) | "gone" | "stale"}
--@include budget
local id, bytes, budget = ARGV[1], tonumber(ARGV[10]), tonumber(ARGV[11])
local share = math.max(2 * bytes, math.floor(budget / tonumber(ARGV[12])))
local status = fenced(id, ARGV[9])
if status ~= 'ok' then return {0, status} end

local fields = {unpack(ARGV, 14)}
local held, in_flight = number(redis.call('HGET', HELD, id)), total()
local first, asked = nil, false -- head of the line, once it was looked for
local fresh = {} -- fields that get a credit now

local function living_head()
  local found = head()
  while found and dead(found) do
    drop(found)
    found = head()
  end
  return found
end

-- what keeps one more credit from being given: nil | "refused" | "share" | "line"
local function obstacle()
  if bytes > budget then return 'refused' end
  if held + bytes > share then return 'share' end
  if not asked then first, asked = living_head(), true end
  return ((first and first ~= id) or in_flight + bytes > budget) and 'line' or nil
end

local function grant(field)
  if #fresh == 0 then
    stop_waiting(id)
    if first == id then first = living_head() end
  end
  fresh[#fresh + 1] = field
  held, in_flight = held + bytes, in_flight + bytes
end

local count, why = 0, nil
for at, credit in ipairs(credited(id, fields)) do
  why = not credit and obstacle() or nil
  if why then break end
  if not credit then grant(fields[at]) end
  count = at
end
if count > 0 then renew(id) end
if #fresh > 0 then
  take(id, fresh, bytes)
  redis.call('PEXPIRE', of(id, CREDITS_OF), ARGV[13])
  wake_line()
end
if not why then return {count, 'granted'} end
if why == 'refused' then return {count, why} end
if why == 'share' then
  leave_line(id)
else
  if not redis.call('ZSCORE', WAITERS, id) then redis.call('ZADD', WAITERS, redis.call('INCR', KEYS[7]), id) end
  redis.call('ZADD', WAITER_LEASES, now + WAITER_LEASE, id)
end
redis.call('HSET', WANTS, id, ARGV[10] .. ' ' .. ARGV[11])
return {count, 'wait'}
