"""An S3 server on loopback, in a process of its own, and a proxy before it that refuses, waits or breaks off.

python tests/s3.py      prints the server's URL, and ends with its standard input
"""

import http.client
import os
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "lab", "AWS_SECRET_ACCESS_KEY": "lab", "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_DEFAULT_REGION": "us-east-1", "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",
}  # fmt: skip


def serve():
    from moto.moto_server.threaded_moto_server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    print("http://{}:{}".format(*server.get_host_and_port()), flush=True)
    sys.stdin.read()
    server.stop()


def same_path():
    """An environment in which a process imports what this one does."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


@contextmanager
def s3_server():
    """Yields its URL."""
    process = subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        env=same_path(),
    )  # fmt: skip
    try:
        url = process.stdout.readline().strip()
        assert url, "moto's server has not started"
        yield url
    finally:
        process.stdin.close()
        process.stdout.close()
        process.wait(100)


class Proxy(BaseHTTPRequestHandler):
    """Hands requests on to server.target, after server.fault(method, path, headers) has seen them.

    fault: returns None; (status, code, message), to answer instead; "break", to end the connection in the middle of
    the request; "lose", to end it before the answer.
    """

    protocol_version = "HTTP/1.1"

    def handle_any(self):
        length = int(self.headers.get("Content-Length", 0))
        fault = self.server.fault(self.command, self.path, length)
        if fault == "break":
            self.rfile.read(length // 2)
            self.close_connection = True
            self.connection.close()
            return
        body = self.rfile.read(length)
        if fault and fault != "lose":
            words = f"<Error><Code>{fault[1]}</Code><Message>{fault[2]}</Message></Error>".encode()
            return self.answer(fault[0], {"Content-Type": "application/xml"}, words)
        connection = http.client.HTTPConnection(urlsplit(self.server.target).netloc)
        connection.request(self.command, self.path, body, dict(self.headers))
        found = connection.getresponse()
        if fault == "lose":
            self.close_connection = True
            self.connection.close()
            connection.close()
            return
        self.answer(found.status, dict(found.getheaders()), found.read())
        connection.close()

    def answer(self, status, headers, body):
        self.send_response(status)
        for name, value in headers.items():
            if name.lower() not in ("content-length", "connection", "transfer-encoding", "server", "date"):
                self.send_header(name, value)
        length = headers.get("Content-Length", len(body)) if self.command == "HEAD" else len(body)
        self.send_header("Content-Length", length)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = handle_any

    def log_message(self, *args):
        pass


@contextmanager
def proxy(target, fault):
    """Yields its URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
    server.daemon_threads = True
    server.target, server.fault = target, fault
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield "http://{}:{}".format(*server.server_address)
    finally:
        server.shutdown()
        server.server_close()


if __name__ == "__main__":
    serve()
