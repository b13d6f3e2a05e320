// Opens pages in headless Chromium, waits until they have loaded or say why not, and prints what they say as JSON.
//
//     node extras/web/tests/loading.mjs '{ "chromium": PATH, "urls": { NAME: URL } }'
import { createRequire } from "node:module";

const { chromium } = createRequire(new URL("../package.json", import.meta.url))("playwright-core");
const { chromium: executablePath, urls } = JSON.parse(process.argv[2]);
const browser = await chromium.launch({ executablePath, args: ["--headless", "--no-sandbox", "--disable-gpu"] });

async function visit([name, url]) {
  const context = await browser.newContext({ reducedMotion: "reduce" });
  const page = await context.newPage();
  await page.goto(url);
  await page.waitForFunction(() => {
    const { textContent } = document.querySelector("#loading, #status");
    return document.body.dataset.state !== "loading" || /reload|python/.test(textContent);
  });
  await page.waitForTimeout(1000); // in case something still changes it
  const state = await page.evaluate(() => document.body.dataset.state);
  const said = await page.locator("#loading, #status, #message").allTextContents();
  return [name, { state, said: said.join("") }];
}

const seen = await Promise.all(Object.entries(urls).map(visit));
await browser.close();
console.log(JSON.stringify(Object.fromEntries(seen)));
