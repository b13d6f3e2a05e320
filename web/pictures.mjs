// Pictures of the exported page, and an animation in which it runs and then breaks. Serve out/web first.
//
//     CHROMIUM=/usr/bin/chromium node web/pictures.mjs http://localhost:8000 out/pictures
//
// The animation needs ffmpeg. Nothing here depends on time: every picture waits for what it shows.
import { execFileSync } from "node:child_process";
import { mkdir, writeFile } from "node:fs/promises";
import { chromium } from "playwright-core";

const LOOKS = {
  page: { viewport: { width: 1280, height: 720 } },
  phone: { viewport: { width: 390, height: 844 }, fullPage: true },
  dark: { viewport: { width: 1280, height: 720 }, colorScheme: "dark" },
};
const SHOWN = 120; // characters in a picture
const FIRST = 60; // characters at the start of the animation: enough to fill the stage
const FULL = 256;
const MISTAKES = ["never moves", "another prompt", "overwritten"];

// the parts of the page that the pictures need
const STEP = "#one"; // the button that adds one character
const TEXT = "#text > *"; // the characters of the text
const ANSWERS = "#mistakes small"; // empty until the page knows what a mistake does
const MISTAKE = (name) => `[value="${name}"]:enabled`; // its radio button

const [site, folder] = process.argv.slice(2);
await mkdir(`${folder}/frames`, { recursive: true });
const args = ["--headless", "--no-sandbox"];
const browser = await chromium.launch({ executablePath: process.env.CHROMIUM, args });

/** Open the page at a step of the lesson. It does not play by itself, so each picture shows a step that we took. */
async function open({ step, ...options }) {
  const page = await browser.newPage({ reducedMotion: "reduce", ...options });
  await page.goto(`${site}#step-${step}`);
  await page.locator(`${STEP}:enabled`).waitFor();
  return page;
}

/** Step until the text has `count` characters and the stage shows them. */
async function write(page, count) {
  for (let length; (length = await page.locator(TEXT).count()) < count; ) {
    await page.locator(STEP).click();
    await page.locator(TEXT).nth(length).waitFor({ state: "attached" });
  }
  await page.mouse.move(0, 0);
  await page.evaluate(() => document.activeElement.blur());
  await page.waitForFunction(() => document.body.dataset.state !== "running");
}

for (const [name, { fullPage, ...options }] of Object.entries(LOOKS)) {
  const page = await open({ step: name === "page" ? 2 : 1, ...options });
  await write(page, SHOWN);
  await page.screenshot({ path: `${folder}/${name}.png`, fullPage });
  await page.close();
}

// the animation: every step at first, then every sixth, then some mistakes
const page = await open({ step: 2, viewport: { width: 1280, height: 720 } });
const frames = []; // lines of a list for ffmpeg
async function shoot(seconds) {
  const file = `frames/${String(frames.length).padStart(3, "0")}.png`;
  await page.screenshot({ path: `${folder}/${file}` });
  frames.push(`file '${file}'`, `duration ${seconds}`);
}
await write(page, FIRST);
await shoot(1); // what readers see if the animation does not play
const first = await page.locator(TEXT).count();
for (let count = first + 1; count < FULL; count += count < first + 32 ? 1 : 6) {
  await write(page, count);
  await shoot(0.125);
}
await write(page, FULL);
await shoot(1.5);
await page.evaluate(() => (location.hash = "#step-4"));
await page.locator(ANSWERS).first().waitFor({ state: "attached" });
await page.waitForFunction((each) => [...document.querySelectorAll(each)].every((it) => it.textContent), ANSWERS);
for (const name of MISTAKES) {
  await page.locator(MISTAKE(name)).check({ force: true });
  await page.evaluate(() => new Promise((resolve) => requestAnimationFrame(() => requestAnimationFrame(resolve))));
  await shoot(2.5);
}
await browser.close();
await writeFile(`${folder}/frames.txt`, frames.join("\n"));
const inputs = ["-y", "-loglevel", "error", "-f", "concat", "-i", `${folder}/frames.txt`, "-fps_mode", "vfr"];
const colours = "split[a][b];[a]palettegen=max_colors=64:stats_mode=diff[p];[b][p]paletteuse=dither=none";
execFileSync("ffmpeg", [...inputs, "-filter_complex", colours, `${folder}/page.gif`], { stdio: "inherit" });
