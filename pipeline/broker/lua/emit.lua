#!lua flags=allow-oom
-- Append one entry to the token log, move the state, tell the readers: one step, so a terminal is never without its tokens.
-- KEYS 1 record, 2 token log, 3 notify channel, 4 events channel
-- ARGV 1 decode attempt or "", 2 tokens before this entry or "", 3 tokens in it, 4 entry (JSON), 5 transitions ("from:to,..."),
--      6 TTL of the log in ms, 7 event to publish or "", 8.. field, value, ...
-- returns {"ok" | "gone" | "stale" | "refused", state}
local state = redis.call('HGET', KEYS[1], 'state')
if not state then return {'gone', ''} end
if ARGV[1] ~= '' and redis.call('HGET', KEYS[1], 'decode_attempt') ~= ARGV[1] then return {'stale', state} end
local to = string.match(',' .. ARGV[5] .. ',', ',' .. state .. ':(%a+),')
if not to then return {'refused', state} end
local before = redis.call('HGET', KEYS[1], 'tokens') or '0'
if ARGV[2] ~= '' and before ~= ARGV[2] then return {'stale', state} end
redis.call('HSET', KEYS[1], 'state', to, 'tokens', before + ARGV[3], unpack(ARGV, 8))
local index = redis.call('RPUSH', KEYS[2], ARGV[4]) - 1
redis.call('PEXPIRE', KEYS[2], ARGV[6])
redis.call('PUBLISH', KEYS[3], index .. ' ' .. ARGV[4])
if ARGV[7] ~= '' then redis.call('PUBLISH', KEYS[4], ARGV[7]) end
return {'ok', to}
