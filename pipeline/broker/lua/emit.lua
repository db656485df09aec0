#!lua flags=allow-oom
-- Append one entry to the token log, move the state, tell the readers: one step, so a terminal is never without its tokens.
-- KEYS 1 record, 2 token log, 3 notify channel, 4 events channel
-- ARGV 1 decode attempt or "", 2 tokens before this entry or "", 3 tokens in it, 4 entry (JSON), 5 transitions ("from:to,..."),
--      6 TTL of the log in ms, 7 event to publish or "", 8.. field, value, ...
-- An entry says how many tokens are before it: sent again by the attempt that wrote it last, it is not appended twice.
-- returns {"ok" | "gone" | "stale" | "refused", state}
local state = redis.call('HGET', KEYS[1], 'state')
if not state then return {'gone', ''} end
if ARGV[1] ~= '' and redis.call('HGET', KEYS[1], 'decode_attempt') ~= ARGV[1] then return {'stale', state} end
local before = redis.call('HGET', KEYS[1], 'tokens') or '0'
if ARGV[2] ~= '' and tonumber(before) == ARGV[2] + ARGV[3] and redis.call('LINDEX', KEYS[2], -1) == ARGV[4] then
  return {'ok', state} -- it is there: this caller's reply was lost, and it asks again
end
local to = string.match(',' .. ARGV[5] .. ',', ',' .. state .. ':(%a+),')
if not to then return {'refused', state} end
if ARGV[2] ~= '' and before ~= ARGV[2] then return {'stale', state} end
redis.call('HSET', KEYS[1], 'state', to, 'tokens', before + ARGV[3], unpack(ARGV, 8))
local index = redis.call('RPUSH', KEYS[2], ARGV[4]) - 1
redis.call('PEXPIRE', KEYS[2], ARGV[6])
redis.call('PUBLISH', KEYS[3], index .. ' ' .. ARGV[4])
if ARGV[7] ~= '' then redis.call('PUBLISH', KEYS[4], ARGV[7]) end
return {'ok', to}
