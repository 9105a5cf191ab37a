"A browser without a window, spoken to through its debugging port. It reaches no network."

import json
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

CHROMIUM = next(filter(None, map(shutil.which, ('chromium', 'chromium-browser', 'google-chrome'))), None)
FLAGS = (
    '--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-component-update '
    '--disable-sync --hide-scrollbars --remote-debugging-port=0 --remote-allow-origins=*'
).split()


class Browser:
    def __init__(self, hosts: tuple = ()):
        "`hosts`: the only ones that are reached."
        self.rules = ', '.join(['MAP * ~NOTFOUND', *(f'EXCLUDE {host}' for host in hosts)])

    def __enter__(self):
        import websocket

        self.home = tempfile.mkdtemp(prefix='browser-')
        self.process = subprocess.Popen(
            [
                CHROMIUM,
                *FLAGS,
                f'--host-resolver-rules={self.rules}',
                f'--user-data-dir={self.home}',
                '--window-size=1300,1000',
                'about:blank',
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        port = Path(self.home) / 'DevToolsActivePort'
        for _ in range(600):
            if port.exists() and len(port.read_text().split()) == 2:
                break
            time.sleep(0.1)
        number, path = port.read_text().split()
        self.socket, self.last, self.session = (
            websocket.create_connection(f'ws://127.0.0.1:{number}{path}', timeout=120),
            0,
            None,
        )
        target = self.call('Target.createTarget', url='about:blank')['targetId']
        self.session = self.call('Target.attachToTarget', targetId=target, flatten=True)['sessionId']
        for domain in ('Page', 'Network', 'Runtime', 'Log'):
            self.call(f'{domain}.enable')
        return self

    def __exit__(self, *_):
        self.socket.close()
        self.process.kill()
        self.process.wait()
        shutil.rmtree(self.home, ignore_errors=True)

    def call(self, method, **params):
        self.last += 1
        self.socket.send(
            json.dumps(
                dict(
                    id=self.last, method=method, params=params, **({'sessionId': self.session} if self.session else {})
                )
            )
        )
        while (m := json.loads(self.socket.recv())).get('id') != self.last:
            self.note(m)
        if 'error' in m:
            raise RuntimeError(f'{method}: {m["error"]}')
        return m['result']

    def note(self, m):
        kind, p = m.get('method'), m.get('params', {})
        if kind == 'Network.requestWillBeSent':
            self.asked.append(p['request']['url'])
        if kind == 'Runtime.exceptionThrown':
            self.said.append(str(p['exceptionDetails'])[:300])
        if kind == 'Log.entryAdded' and p['entry']['level'] == 'error':
            self.said.append(p['entry']['text'])

    asked, said = [], []  # addresses that the page asked for, errors that it told

    def open(self, path, ready='document.readyState=="complete"'):
        "Open a file and wait until `ready` holds."
        self.open_address(Path(path).resolve().as_uri(), ready)

    def open_address(self, address, ready='document.readyState=="complete"'):
        "Open an address and wait until `ready` holds."
        self.asked, self.said = [], []
        self.call('Page.navigate', url=address)
        for _ in range(600):
            if self.js(f'location.href!="about:blank" && ({ready})'):
                return
            time.sleep(0.1)
        raise TimeoutError(f'{address} does not come to rest')

    def js(self, expression):
        r = self.call('Runtime.evaluate', expression=expression, returnByValue=True, awaitPromise=True)
        if 'exceptionDetails' in r:
            raise RuntimeError(str(r['exceptionDetails'])[:500])
        return r['result'].get('value')

    def picture(self, path, width=1300, height=1000):
        "A screenshot."
        import base64

        self.call('Emulation.setDeviceMetricsOverride', width=width, height=height, deviceScaleFactor=1, mobile=False)
        Path(path).write_bytes(base64.b64decode(self.call('Page.captureScreenshot', format='png')['data']))
