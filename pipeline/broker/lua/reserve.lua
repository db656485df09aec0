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
local wish = ARGV[10] .. ' ' .. ARGV[11]
local share = math.max(2 * bytes, math.floor(budget / tonumber(ARGV[12])))

local function reserve(field)
  if redis.call('HEXISTS', of(id, CREDITS_OF), field) == 1 then
    renew(id)
    return 'granted'
  end
  if bytes > budget then return 'refused' end
  if number(redis.call('HGET', HELD, id)) + bytes > share then
    leave_line(id)
    redis.call('HSET', WANTS, id, wish)
    return 'wait'
  end
  local first = head()
  while first and dead(first) do
    stop_waiting(first)
    first = head()
  end
  if (first and first ~= id) or total() + bytes > budget then
    if not redis.call('ZSCORE', WAITERS, id) then
      redis.call('ZADD', WAITERS, redis.call('INCR', KEYS[7]), id)
    end
    redis.call('ZADD', WAITER_LEASES, now + WAITER_LEASE, id)
    redis.call('HSET', WANTS, id, wish)
    return 'wait'
  end
  take(id, field, bytes)
  renew(id)
  redis.call('PEXPIRE', of(id, CREDITS_OF), ARGV[13])
  stop_waiting(id)
  wake_line()
  return 'granted'
end

local status = fenced(id, ARGV[9])
if status ~= 'ok' then return {0, status} end
for at = 14, #ARGV do
  status = reserve(ARGV[at])
  if status ~= 'granted' then return {at - 14, status} end
end
return {#ARGV - 13, 'granted'}
