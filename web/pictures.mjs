// Pictures of the exported page after a run: wide, on a phone, and in the dark. Serve out/web first.
//
//     CHROMIUM=/usr/bin/chromium node web/pictures.mjs http://localhost:8000 out/pictures
import { mkdir } from "node:fs/promises";
import { chromium } from "playwright-core";

const LOOKS = {
  wide: { viewport: { width: 1280, height: 1700 } },
  phone: { viewport: { width: 390, height: 844 }, fullPage: true },
  dark: { viewport: { width: 1280, height: 900 }, colorScheme: "dark", fullPage: true },
};

const [site, folder] = process.argv.slice(2);
await mkdir(folder, { recursive: true });
const args = ["--headless", "--no-sandbox"];
const browser = await chromium.launch({ executablePath: process.env.CHROMIUM, args });
for (const [name, { fullPage, ...options }] of Object.entries(LOOKS)) {
  const page = await browser.newPage(options);
  await page.goto(site);
  await page.locator("#run:enabled").click();
  await page.waitForFunction(() => / of the probability/.test(document.getElementById("influences").ariaLabel));
  await page.locator("#take-out").click();
  await page.evaluate(() => document.querySelectorAll("main details").forEach((details) => (details.open = true)));
  await page.locator("#position").fill("40");
  await page.locator("#next .after").first().waitFor();
  await page.evaluate(() => document.activeElement.blur());
  // a bar that follows the view would cover a part of a long picture
  if (fullPage) await page.evaluate(() => (document.getElementById("bar").style.position = "static"));
  await page.screenshot({ path: `${folder}/${name}.png`, fullPage });
  await page.close();
}
await browser.close();
