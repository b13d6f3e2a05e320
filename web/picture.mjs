// A picture of the exported page after both runs, for the README. Serve out/web first.
//
//     CHROMIUM=/usr/bin/chromium node web/picture.mjs http://localhost:8000 assets/page.png
import { chromium } from "playwright-core";

const [site, file] = process.argv.slice(2);
const args = ["--headless", "--no-sandbox"];
const browser = await chromium.launch({ executablePath: process.env.CHROMIUM, args });
const page = await browser.newPage({ viewport: { width: 1280, height: 800 } });
await page.goto(site);
await page.locator("#compare:enabled").click();
await page.waitForFunction(() => document.body.dataset.state === "done", null, { timeout: 120_000 });
await page.screenshot({ path: file });
await browser.close();
