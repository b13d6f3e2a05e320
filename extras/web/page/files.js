// The files that index.html preloads. Only the page itself can use what its HTML preloads, so it fetches the files for
// its worker, which unpacks them.

/** In the page: return one of these files, a Blob. */
export async function download(name) {
  const { href } = document.querySelector(`link[href^="${name}"]`); // with the "?..." that the exporter adds
  try {
    const response = await fetch(href);
    if (!response.ok) throw incomplete(`The server answered ${response.status} for ${name}`);
    return new Blob([await response.arrayBuffer()]); // response.blob() fails in Chromium with many pages at once
  } catch (error) {
    throw error.said ? error : unreachable(name);
  }
}

/** In the worker: return the bytes of one of the page's files, an ArrayBuffer. */
export function fetched(name) {
  return new Promise((resolve) => {
    const { port1, port2 } = new MessageChannel();
    port1.onmessage = ({ data }) => resolve(unpacked(name, data)); // if the fetch fails, the page ends the worker
    postMessage({ event: "file", name }, [port2]);
  });
}

/** Return the bytes of a Blob. We unpack gzip files here, because a plain server does not declare them as packed. */
async function unpacked(name, blob) {
  const magic = new Uint8Array(await blob.slice(0, 2).arrayBuffer());
  if (magic[0] !== 0x1f || magic[1] !== 0x8b) return blob.arrayBuffer(); // a server may have unpacked it
  const stream = blob.stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).arrayBuffer().catch(() => Promise.reject(incomplete(`${name} is damaged`)));
}

// -- errors, with the way out -------------------------------------------------------------------------------------------

/** Run `work`, a part of loading. An error names the part and says what to do. */
export async function part(name, work) {
  try {
    return await work();
  } catch (error) {
    if (error.said) throw error;
    const reason = String(error?.message ?? error).trim().replace(/\.$/, "");
    const isModule = /import/i.test(reason); // "dynamically imported module", however a browser words it
    if (isModule) throw unreachable(name);
    if (/no available backend/.test(reason)) throw said(`This browser cannot run the model. Try another one. (${reason})`);
    throw incomplete(`${name} did not load: ${reason}`);
  }
}

export function unreachable(name) {
  return said(`${name} could not be downloaded. Check your connection and reload.`);
}

function incomplete(what) {
  return said(`${what}. Reload the page. If that does not help, export it again: python -m extras.export --format web.`);
}

const said = (message) => Object.assign(new Error(message), { said: true });
