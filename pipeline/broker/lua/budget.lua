-- The credit ledger's verbs, included by every script that moves credit. `pipeline/budget.py` is the same rule.
-- KEYS 1 total, 2 waiters, 3 waiter leases, 4 leases, 5 held, 6 wants (the page server's, standalone by design)
-- ARGV 1 handoff id or "", 2 lease ms, 3 waiter lease ms, 4-8 patterns, "*" standing for a handoff id:
--      4 credits, 5 stream, 6 fence, 7 wake, 8 payload prefix
local TOTAL, WAITERS, WAITER_LEASES, LEASES, HELD, WANTS = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local LEASE, WAITER_LEASE = tonumber(ARGV[2]), tonumber(ARGV[3])
local CREDITS_OF, STREAM_OF, FENCE_OF, WAKE_OF, PAYLOAD_OF = ARGV[4], ARGV[5], ARGV[6], ARGV[7], ARGV[8]
local function of(id, pattern) return (string.gsub(pattern, '%*', id)) end
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)

local function number(value) return tonumber(value or '0') end
local function total() return number(redis.call('GET', TOTAL)) end
-- %.0f: Lua prints a number above 10^14 in scientific notation, which Redis refuses
local function set_total(bytes) redis.call('SET', TOTAL, string.format('%.0f', math.max(0, bytes))) end
local function add_held(id, bytes)
  local held = redis.call('HINCRBY', HELD, id, string.format('%.0f', bytes))
  if held <= 0 then redis.call('HDEL', HELD, id) end
  return held
end
local function renew(id) redis.call('ZADD', LEASES, now + LEASE, id) end

local function leave_line(id)
  redis.call('ZREM', WAITERS, id)
  redis.call('ZREM', WAITER_LEASES, id)
end
local function stop_waiting(id)
  if redis.call('HDEL', WANTS, id) == 1 then leave_line(id) end -- whoever is in the line has a wish
end
-- one who stopped asking; out of the line whether it has a wish or not: the caller goes on with whoever is next
local function drop(id)
  redis.call('HDEL', WANTS, id)
  leave_line(id)
end
local function dead(id) return number(redis.call('ZSCORE', WAITER_LEASES, id)) <= now end
local function head() return redis.call('ZRANGE', WAITERS, 0, 0)[1] end

-- one token is enough: whoever was woken asks again, and may be told to wait again
local function wake(id)
  local key = of(id, WAKE_OF)
  if redis.call('LLEN', key) == 0 then redis.call('RPUSH', key, '1') end
  redis.call('PEXPIRE', key, WAITER_LEASE)
end

-- from the head of the line while bytes remain; the dead on the way are dropped
local function wake_line()
  local promised, at = nil, 0
  while true do
    local id = redis.call('ZRANGE', WAITERS, at, at)[1]
    if not id then return end
    if dead(id) then
      drop(id)
    else
      local size, budget = string.match(redis.call('HGET', WANTS, id) or '0 0', '(%d+) (%d+)')
      promised = (promised or total()) + tonumber(size)
      if promised > tonumber(budget) then return end
      wake(id)
      at = at + 1
    end
  end
end

-- bytes of each of these credits, in order; false where there is none
local function credited(id, fields) return redis.call('HMGET', of(id, CREDITS_OF), unpack(fields)) end

-- new credits of `bytes` each; no field is named twice
local function take(id, fields, bytes)
  local set = {}
  for _, field in ipairs(fields) do
    set[#set + 1] = field
    set[#set + 1] = bytes
  end
  redis.call('HSET', of(id, CREDITS_OF), unpack(set))
  set_total(total() + bytes * #fields)
  add_held(id, bytes * #fields)
end

-- those of these credits that are there go, counted once however often a lost reply is asked again; returns how many
local function give(id, fields)
  local bytes, there, named = 0, {}, {}
  for at, held in ipairs(credited(id, fields)) do
    local field = fields[at]
    if held and not named[field] then
      named[field] = true
      bytes = bytes + tonumber(held)
      there[#there + 1] = field
    end
  end
  if #there == 0 then return 0 end
  redis.call('HDEL', of(id, CREDITS_OF), unpack(there))
  set_total(total() - bytes)
  if add_held(id, -bytes) <= 0 then redis.call('ZREM', LEASES, id) else renew(id) end
  return #there
end

-- everything of a handoff goes. Its bytes are read from `held`, which has no TTL: the total stays right even when
-- the credits have expired
local function close(id)
  local prefix = of(id, PAYLOAD_OF)
  for _, field in ipairs(redis.call('HKEYS', of(id, CREDITS_OF))) do redis.call('UNLINK', prefix .. field) end
  set_total(total() - number(redis.call('HGET', HELD, id)))
  redis.call('HDEL', HELD, id)
  redis.call('ZREM', LEASES, id)
  stop_waiting(id)
  redis.call('UNLINK', of(id, CREDITS_OF), of(id, STREAM_OF), of(id, FENCE_OF), of(id, WAKE_OF))
end

-- "ok" | "gone" (released, reaped, or the server restarted) | "stale" (another attempt owns the handoff)
local function fenced(id, attempts)
  local fence = redis.call('GET', of(id, FENCE_OF))
  if not fence then return 'gone' end
  return fence == attempts and 'ok' or 'stale'
end
