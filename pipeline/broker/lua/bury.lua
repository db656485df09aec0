#!lua flags=allow-oom
-- Either the workers ("released") or the API ("forgotten") is done with an ended handoff; the second of the two removes it.
-- KEYS 1 record, 2 token log
-- ARGV 1 this side's field, 2 the other side's field, 3 TTL in ms of what waits for the other side, 4 fields to be read: "a,b"
-- returns those that were there, as a JSON object
local seen = {}
for name in string.gmatch(ARGV[4], '[^,]+') do seen[name] = redis.call('HGET', KEYS[1], name) or nil end
seen = cjson.encode(seen)
if redis.call('EXISTS', KEYS[1]) == 0 or redis.call('HEXISTS', KEYS[1], ARGV[2]) == 1 then
  redis.call('UNLINK', KEYS[1], KEYS[2])
  return seen
end
redis.call('HSET', KEYS[1], ARGV[1], '1')
redis.call('PEXPIRE', KEYS[1], ARGV[3])
redis.call('PEXPIRE', KEYS[2], ARGV[3])
return seen
