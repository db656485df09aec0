#!lua flags=allow-oom
-- A queue that nobody serves any more leaves the list of queues, unless something of it is still there.
-- KEYS 1 RQ's set of queues, 2 the queue, 3.. what belongs to it: registries, the list of its workers
-- returns 1 when it has left, else 0
for at = 2, #KEYS do
  if redis.call('EXISTS', KEYS[at]) == 1 then return 0 end
end
return redis.call('SREM', KEYS[1], KEYS[2])
