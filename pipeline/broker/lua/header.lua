#!lua flags=allow-oom
-- Append one frame header under its own id, so that a second time is no second entry; true up its credit to what
-- the codec left. COMMIT and ABORT must pass at maxmemory: allow-oom.
-- KEYS, ARGV 1-8 as budget.lua
-- ARGV 9 attempts, 10 entry id "attempt-sequence", 11 header, 12 payload bytes (0: no payload), 13 credit field, 14 handoff ttl ms,
--      15 "1": only right behind the header before it (several go out before the first is answered)
-- returns "ok" | "missing" (its payload is not there) | "gap" (the header before it is not there) | "gone" | "stale"
--@include budget
local id, stream, bytes = ARGV[1], of(ARGV[1], STREAM_OF), tonumber(ARGV[12])
local payload, credits = of(ARGV[1], PAYLOAD_OF) .. ARGV[13], of(ARGV[1], CREDITS_OF)
-- SET cannot be fenced: a payload stored without a credit (a stale writer's, or sent again after its import) goes here
local function drop_stray()
  if bytes > 0 and redis.call('HEXISTS', credits, ARGV[13]) == 0 then redis.call('UNLINK', payload) end
end
local status = fenced(id, ARGV[9])
if status ~= 'ok' then
  drop_stray()
  return status
end
local major, minor = string.match(ARGV[10], '(%d+)-(%d+)')
local before = -1
if redis.call('EXISTS', stream) == 1 then
  local info = redis.call('XINFO', 'STREAM', stream)
  for at = 1, #info, 2 do
    if info[at] == 'last-generated-id' then
      local last_major, last_minor = string.match(info[at + 1], '(%d+)-(%d+)')
      if last_major == major then before = tonumber(last_minor) end
    end
  end
end
if before >= tonumber(minor) then
  drop_stray()
  return 'ok'
end
if ARGV[15] == '1' and before + 1 ~= tonumber(minor) then
  drop_stray()
  return 'gap'
end
if bytes > 0 then
  if redis.call('STRLEN', payload) ~= bytes then return 'missing' end
  local held = number(redis.call('HGET', credits, ARGV[13]))
  if held == 0 then
    drop_stray()
    return 'missing'
  end
  if bytes < held then
    redis.call('HSET', credits, ARGV[13], ARGV[12])
    set_total(total() - held + bytes)
    add_held(id, bytes - held)
    wake_line()
  end
end
redis.call('XADD', stream, ARGV[10], 'h', ARGV[11])
redis.call('PEXPIRE', stream, ARGV[14])
return 'ok'
