// The files of this folder: fetched side by side, unpacked, and reported while they arrive.

const WHAT_TO_DO = "Write the folder again (python export.py --format web) and serve it (python -m http.server).";

/** Do `work`, a part of loading. An error names the part and says what to do. */
export async function part(name, work) {
  try {
    return await work();
  } catch (error) {
    throw new Error(`${name} did not load: ${String(error?.message ?? error).trim().replace(/\.$/, "")}. ${WHAT_TO_DO}`);
  }
}

/** Return (name) => bytes of a file, an ArrayBuffer. onProgress(received, total) is called while files arrive. */
export function fetcher(onProgress) {
  let received = 0;
  let total = 0;
  return async (name) => {
    // a newer export must not meet half of an older one in the browser's cache
    const response = await fetch(new URL(name, import.meta.url), { cache: "no-cache" });
    if (!response.ok) throw new Error(`${response.status} ${response.statusText}`);
    total += Number(response.headers.get("Content-Length") ?? 0);
    const parts = [];
    const reader = response.body.getReader();
    for (let next = await reader.read(); !next.done; next = await reader.read()) {
      parts.push(next.value);
      received += next.value.length;
      onProgress(received, Math.max(received, total));
    }
    return unpacked(new Blob(parts));
  };
}

/** Return the bytes of a Blob. A gzip file is unpacked here, because a plain server does not say that it is packed. */
async function unpacked(blob) {
  const magic = new Uint8Array(await blob.slice(0, 2).arrayBuffer());
  if (magic[0] !== 0x1f || magic[1] !== 0x8b) return blob.arrayBuffer(); // a server may have unpacked it
  return new Response(blob.stream().pipeThrough(new DecompressionStream("gzip"))).arrayBuffer();
}
