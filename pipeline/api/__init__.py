"""The HTTP edge: OpenAI-compatible, asyncio, text in and text out. Knows no engine, no page and no job function."""
