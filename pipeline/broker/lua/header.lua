#!lua flags=allow-oom
-- Append frame headers in order, each under its own id, so that a second time is no second entry; true up their credits
-- to what the codec left. COMMIT and ABORT must pass at maxmemory: allow-oom.
-- KEYS, ARGV 1-8 as budget.lua
-- ARGV 9 attempts, 10 handoff ttl ms, then five for each frame: entry id "attempt-sequence", header, payload bytes
--      (0: no payload), credit field, "1": only right behind the header before it (several groups go out before the first is answered)
-- returns {how many of the leading frames are there,
--          "ok" (all) | "missing" (its payload is not there) | "gap" (the header before it is not there) | "gone" | "stale"}
--@include budget
local id, stream, prefix = ARGV[1], of(ARGV[1], STREAM_OF), of(ARGV[1], PAYLOAD_OF)

local function last_sequence(major)
  if redis.call('EXISTS', stream) == 0 then return -1 end
  local info = redis.call('XINFO', 'STREAM', stream)
  for at = 1, #info, 2 do
    if info[at] == 'last-generated-id' then
      local last_major, last_minor = string.match(info[at + 1], '(%d+)-(%d+)')
      return last_major == major and tonumber(last_minor) or -1
    end
  end
end
local before = last_sequence(string.match(ARGV[11], '%d+'))

local fields, credit_of = {}, {} -- bytes, or false
for at = 11, #ARGV, 5 do fields[#fields + 1] = ARGV[at + 3] end
for at, bytes in ipairs(credited(id, fields)) do credit_of[fields[at]] = bytes end

-- SET cannot be fenced: a payload stored without a credit (a stale writer's, or sent again after its import) goes here
local function drop_stray(at)
  local field = ARGV[at + 3]
  if ARGV[at + 2] ~= '0' and not credit_of[field] then redis.call('UNLINK', prefix .. field) end
end

local function require_payload(field, bytes)
  local held = number(credit_of[field])
  if held == 0 or redis.call('STRLEN', prefix .. field) ~= bytes then return 'missing' end
  if bytes < held then
    redis.call('HSET', of(id, CREDITS_OF), field, string.format('%.0f', bytes))
    set_total(total() - held + bytes)
    add_held(id, bytes - held)
    wake_line()
  end
  return 'ok'
end

local function append(at)
  local sequence, bytes, status = tonumber(string.match(ARGV[at], '-(%d+)')), tonumber(ARGV[at + 2]), 'ok'
  if before >= sequence then
    drop_stray(at)
    return 'ok'
  end
  if ARGV[at + 4] == '1' and before + 1 ~= sequence then return 'gap' end
  if bytes > 0 then status = require_payload(ARGV[at + 3], bytes) end
  if status == 'ok' then
    redis.call('XADD', stream, ARGV[at], 'h', ARGV[at + 1])
    before = sequence
  end
  return status
end

local status, sent = fenced(id, ARGV[9]), 0
for at = 11, #ARGV, 5 do
  if status == 'ok' then status = append(at) end
  if status == 'ok' then
    sent = sent + 1
  else
    drop_stray(at)
  end
end
if sent > 0 then redis.call('PEXPIRE', stream, ARGV[10]) end
return {sent, status}
