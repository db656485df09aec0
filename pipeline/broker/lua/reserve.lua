#!lua
-- Ask for the right to put bytes in flight; idempotent per credit. Not allow-oom: at maxmemory nothing new begins.
-- KEYS, ARGV 1-8 as budget.lua; KEYS 7 arrivals
-- ARGV 9 attempts "p.d", 10 credit field "p.d.sequence", 11 bytes, 12 budget bytes, 13 share divisor, 14 handoff ttl ms
-- returns "granted" | "wait" | "refused" (larger than the budget) | "gone" | "stale"
--@include budget
local id, field, bytes, budget = ARGV[1], ARGV[10], tonumber(ARGV[11]), tonumber(ARGV[12])
local status = fenced(id, ARGV[9])
if status ~= 'ok' then return status end
if redis.call('HEXISTS', of(id, CREDITS_OF), field) == 1 then
  renew(id)
  return 'granted'
end
if bytes > budget then return 'refused' end
local wish = ARGV[11] .. ' ' .. ARGV[12]
local share = math.max(2 * bytes, math.floor(budget / tonumber(ARGV[13])))
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
redis.call('PEXPIRE', of(id, CREDITS_OF), ARGV[14])
stop_waiting(id)
wake_line()
return 'granted'
