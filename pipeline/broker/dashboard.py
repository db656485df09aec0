"""Dashboard: rq-dashboard as a web page over our queues. Not part of the API; run it in a process of its own.

rq-dashboard reads some jobs without naming a serializer, and RQ's default unpickles. So `create_app` replaces that
default by JSON for the whole process: pages work, and nothing that lies in the broker is ever unpickled.
"""

from __future__ import annotations

from typing import Any

from pipeline.broker.address import redact
from pipeline.broker.connect import connect, translate
from pipeline.errors import ConfigError

PREFIX = "/rq"
POLL_MS = 2500


def create_app(redis_url: str) -> Any:
    """A Flask (WSGI) application with rq-dashboard under PREFIX. Raises ConfigError when it is not installed.

    Deleting is off: a handoff whose job vanished would only end by its deadline. Requeueing is harmless, because the
    ledger refuses a handoff that has ended.
    """
    try:
        import flask
        import rq.serializers
        from rq_dashboard import default_settings, web
    except ImportError as error:
        raise ConfigError(f"the dashboard needs `pip install 'crossfill[dashboard]'` ({error})") from error
    rq.serializers.PickleSerializer = rq.serializers.JSONSerializer  # type: ignore[assignment]
    web.config.serializer = rq.serializers.JSONSerializer
    app = flask.Flask("crossfill-dashboard")
    app.config.from_object(default_settings)
    app.config.update(
        RQ_DASHBOARD_REDIS_URL=redis_url, RQ_DASHBOARD_DISABLE_DELETE=True, RQ_DASHBOARD_POLL_INTERVAL=POLL_MS
    )
    web.setup_rq_connection(app)
    app.register_blueprint(web.blueprint, url_prefix=PREFIX)
    app.add_url_rule("/", "root", lambda: flask.redirect(f"{PREFIX}/"))
    return app


def main(url: str, port: int, host: str = "127.0.0.1") -> None:
    """Serve the dashboard of the broker at `url` until interrupted. Raises ConfigError, BrokerError.

    There is no login: keep `host` on the loopback, or put a proxy that asks for one in front.
    """
    with connect(url) as client, translate():
        client.ping()
    app = create_app(url)
    print(f"dashboard of {redact(url)}: http://{host}:{port}{PREFIX}/", flush=True)  # noqa: T201
    app.run(host=host, port=port, debug=False, use_reloader=False)
