#!lua flags=allow-oom
-- A participant leaves (or a cancel finds nobody working): the last one out of a cancelled handoff makes it terminal.
-- KEYS 1 record, 2 token log, 3 notify channel, 4 events channel
-- ARGV 1 role or "", 2 its attempt, 3 error (JSON) or "", 4 transitions to apply first or "", 5 event to publish or "",
--      6 transitions of RELEASE, 7 terminal entry of a cancelled handoff (JSON), 8 TTL of the log in ms, 9.. field, value, ...
-- returns {"ok" | "gone" | "stale" | "refused", state, 1 when nobody works on it any more}
local state = redis.call('HGET', KEYS[1], 'state')
if not state then return {'gone', '', 0} end
if ARGV[1] ~= '' then
  if redis.call('HGET', KEYS[1], ARGV[1] .. '_attempt') ~= ARGV[2] then return {'stale', state, 0} end
  redis.call('HDEL', KEYS[1], ARGV[1] .. '_worker')
  if ARGV[3] ~= '' then redis.call('HSET', KEYS[1], ARGV[1] .. '_error', ARGV[3]) end
end
if ARGV[4] ~= '' then
  local to = string.match(',' .. ARGV[4] .. ',', ',' .. state .. ':(%a+),')
  if not to then return {'refused', state, 0} end
  state = to
  redis.call('HSET', KEYS[1], 'state', state)
end
if #ARGV > 8 then redis.call('HSET', KEYS[1], unpack(ARGV, 9)) end
local idle = redis.call('HEXISTS', KEYS[1], 'prefill_worker') + redis.call('HEXISTS', KEYS[1], 'decode_worker') == 0
local to = idle and string.match(',' .. ARGV[6] .. ',', ',' .. state .. ':(%a+),')
if to then
  state = to
  redis.call('HSET', KEYS[1], 'state', state)
  local index = redis.call('RPUSH', KEYS[2], ARGV[7]) - 1
  redis.call('PEXPIRE', KEYS[2], ARGV[8])
  redis.call('PUBLISH', KEYS[3], index .. ' ' .. ARGV[7])
end
if ARGV[5] ~= '' then redis.call('PUBLISH', KEYS[4], ARGV[5]) end
return {'ok', state, idle and 1 or 0}
