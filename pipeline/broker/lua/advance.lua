#!lua flags=allow-oom
-- One transition of a handoff by compare-and-set, with the fields that belong to it.
-- KEYS 1 record, 2 events channel
-- ARGV 1 role or "", 2 its attempt, 3 transitions ("from:to,...") or "" (fields only), 4 event to publish or "", 5.. field, value, ...
-- returns {"ok" | "gone" | "stale" | "refused", state}
local state = redis.call('HGET', KEYS[1], 'state')
if not state then return {'gone', ''} end
if ARGV[1] ~= '' and redis.call('HGET', KEYS[1], ARGV[1] .. '_attempt') ~= ARGV[2] then return {'stale', state} end
local to = state
if ARGV[3] ~= '' then to = string.match(',' .. ARGV[3] .. ',', ',' .. state .. ':(%a+),') end
if not to then return {'refused', state} end
redis.call('HSET', KEYS[1], 'state', to, unpack(ARGV, 5))
if ARGV[4] ~= '' then redis.call('PUBLISH', KEYS[2], ARGV[4]) end
return {'ok', to}
