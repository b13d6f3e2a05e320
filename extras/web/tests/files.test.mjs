import assert from "node:assert/strict";
import { createServer } from "node:http";
import { after, before, test } from "node:test";
import { gzipSync } from "node:zlib";
import { downloader, fetched, part } from "../page/files.js";

const CONTENT = "abc".repeat(1000);
const PACKED = gzipSync(CONTENT);
const CHECK = "Check your connection and reload.";

/** How the server answers for each file. */
const ANSWERS = {
  whole: (response) => response.end(PACKED),
  unpacked: (response) => response.end(CONTENT),
  cut: (response) => {
    response.writeHead(200, { "Content-Length": PACKED.length });
    response.write(PACKED.subarray(0, 9), () => response.destroy());
  },
  none: (response) => response.destroy(),
  missing: (response) => response.writeHead(404).end(),
  damaged: (response) => response.end(PACKED.subarray(0, PACKED.length / 2)),
};
const server = createServer(({ url }, response) => ANSWERS[url.slice(1)](response));

before(() => new Promise((resolve) => server.listen(0, "127.0.0.1", resolve)));
after(() => {
  server.close();
  server.closeAllConnections();
});

/** Fetch a file as the worker does, with the page at the other end of the port. */
async function bytes(name, onProgress = () => {}) {
  const { port } = server.address();
  const href = `http://127.0.0.1:${port}/${name}`;
  globalThis.document = { querySelector: () => ({ href }) };
  const blob = await downloader(onProgress)(name);
  globalThis.postMessage = (event, [port]) => {
    port.postMessage(blob);
    port.close(); // otherwise Node.js waits for more
  };
  return part(name, () => fetched(name));
}

test("a file arrives unpacked, however the server sends it, and its progress is told", async () => {
  const progress = [];
  for (const name of ["whole", "unpacked"]) {
    const file = await bytes(name, (...numbers) => progress.push(numbers));
    assert.equal(new TextDecoder().decode(file), CONTENT);
  }
  assert.deepEqual(progress.at(-1), [CONTENT.length, CONTENT.length]);
});

test("a file that does not arrive is named, with the way out", async () => {
  for (const name of ["cut", "none"]) {
    await assert.rejects(bytes(name), { message: `${name} could not be downloaded. ${CHECK}` });
  }
  await assert.rejects(bytes("missing"), { message: /^The server answered 404 for missing\. Reload .* extras\.export/ });
  await assert.rejects(bytes("damaged"), { message: /^damaged is damaged\. Reload .* extras\.export/ });
});

test("a browser that cannot run the model is not sent to the exporter", async () => {
  const fail = (reason) => part("The model", () => Promise.reject(new Error(reason)));
  const backend = "no available backend found. ERR: [wasm]";
  await assert.rejects(fail(`${backend} Error: WebAssembly SIMD is not supported`), { message: /^This browser cannot .* SIMD/ });
  await assert.rejects(fail(`${backend} TypeError: dynamically imported module`), { message: `The model could not be downloaded. ${CHECK}` });
  await assert.rejects(fail("a bad graph"), { message: /a bad graph\. .* extras\.export/ });
});
