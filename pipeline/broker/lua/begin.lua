#!lua
-- All that begins a handoff: its record, its place among the live, RQ's own commands for its jobs. Or nothing, when it is
-- read too late: whoever asked has told its client by then that it failed.
-- KEYS every key that the commands write to
-- ARGV 1 the latest time, ms of this server's clock, or "" for any; 2 commands, each a list of words (MessagePack)
-- returns 1, or 0 when it is too late
if ARGV[1] ~= '' then
  local time = redis.call('TIME')
  if time[1] * 1000 + time[2] / 1000 > tonumber(ARGV[1]) then return 0 end
end
for _, words in ipairs(cmsgpack.unpack(ARGV[2])) do redis.call(unpack(words)) end
return 1
