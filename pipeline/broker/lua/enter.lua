#!lua flags=allow-oom
-- A worker begins one role of a handoff: counts the attempt and names the participant.
-- KEYS 1 record, 2 events channel
-- ARGV 1 role, 2 worker, 3 transitions of START ("from:to,from:to"), 4 broker time in ms
-- returns {"gone"} | {"over", state} | {"ok", attempt, record as a flat list}
local state = redis.call('HGET', KEYS[1], 'state')
if not state then return {'gone'} end
local to = string.match(',' .. ARGV[3] .. ',', ',' .. state .. ':(%a+),')
if not to then return {'over', state} end
local attempt = redis.call('HINCRBY', KEYS[1], ARGV[1] .. '_attempt', 1)
redis.call('HSET', KEYS[1], 'state', to, ARGV[1] .. '_worker', ARGV[2], 'at_' .. ARGV[1] .. '_started', ARGV[4])
redis.call('HDEL', KEYS[1], ARGV[1] .. '_error')
redis.call('PUBLISH', KEYS[2], 'started')
return {'ok', attempt, redis.call('HGETALL', KEYS[1])}
