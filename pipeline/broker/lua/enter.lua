#!lua flags=allow-oom
-- A worker begins the job of one role that was queued last, once: whoever comes second, late or elsewhere does not.
-- KEYS 1 record, 2 events channel
-- ARGV 1 role, 2 worker, 3 transitions of START ("from:to,from:to"), 4 broker time in ms, 5 what tells this caller from others,
--      6 name of the replica the job must be for, or "" (any)
-- returns {"gone"} | {"over", state} | {"taken"} | {"moved"} | {"ok", attempt, record as a flat list}
local state = redis.call('HGET', KEYS[1], 'state')
if not state then return {'gone'} end
local to = string.match(',' .. ARGV[3] .. ',', ',' .. state .. ':(%a+),')
if not to then return {'over', state} end
local attempt = redis.call('HGET', KEYS[1], ARGV[1] .. '_attempt') or '0'
local begun = redis.call('HGET', KEYS[1], ARGV[1] .. '_begun') or '0.'
local mine = attempt .. '.' .. ARGV[5]
if begun ~= mine then -- else this caller's own reply was lost
  if ARGV[6] ~= '' and cjson.decode(redis.call('HGET', KEYS[1], 'route')).decode_replica ~= ARGV[6] then return {'moved'} end
  if string.match(begun, '^%d+') == attempt then return {'taken'} end
end
redis.call('HSET', KEYS[1], 'state', to, ARGV[1] .. '_begun', mine, ARGV[1] .. '_worker', ARGV[2],
  'at_' .. ARGV[1] .. '_started', ARGV[4])
redis.call('HDEL', KEYS[1], ARGV[1] .. '_error')
redis.call('PUBLISH', KEYS[2], 'started')
return {'ok', tonumber(attempt), redis.call('HGETALL', KEYS[1])}
