#!lua flags=allow-oom
-- An API process lives on. allow-oom: a full broker must not look like the death of every API process.
-- KEYS 1 owner key; ARGV 1 lease in ms
return redis.call('SET', KEYS[1], '1', 'PX', ARGV[1])
