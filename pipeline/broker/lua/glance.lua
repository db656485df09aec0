#!lua flags=no-writes
-- Some fields of many records. One script, since a client takes far longer over many answers than over one long one.
-- KEYS records
-- ARGV fields
-- returns a JSON array: of each record the values in the order of the fields, false where there is none
local found = {}
for at, key in ipairs(KEYS) do found[at] = redis.call('HMGET', key, unpack(ARGV)) end
return cjson.encode(found)
