#!lua flags=allow-oom
-- Everything of one handoff goes from the page server. Idempotent.
-- KEYS, ARGV 1-8 as budget.lua
--@include budget
close(ARGV[1])
wake_line()
return 1
