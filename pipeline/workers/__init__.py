"""Workers: one process per replica, an RQ worker of many jobs beside one loaded engine."""
