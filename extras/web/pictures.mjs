// The race as a picture and as an animation, page.png and page.gif. Serve out/web first.
//
//     CHROMIUM=/usr/bin/chromium node extras/web/pictures.mjs http://localhost:8000 out/pictures
//
// The animation needs ffmpeg. It is a recording of a real race, with the clocks of the computer, played in RACE seconds.
import { execFileSync } from "node:child_process";
import { mkdir, writeFile } from "node:fs/promises";
import { chromium } from "playwright-core";

const RACE = 6; // seconds
const BETWEEN = 0.1; // seconds between frames
const [BEFORE, AFTER] = [1, 1.5]; // seconds that the first frame stays, and the last, which is there twice

const [site, folder] = process.argv.slice(2);
await mkdir(`${folder}/frames`, { recursive: true });
const browser = await chromium.launch({ executablePath: process.env.CHROMIUM, args: ["--headless", "--no-sandbox"] });
const page = await browser.newPage({ viewport: { width: 1280, height: 600 } });
await page.goto(`${site}#step-2`);
await page.locator("#run:enabled").waitFor();
await page.waitForFunction(() => document.body.dataset.state === "paused");

// record the race
const frames = []; // { seconds, data }
const client = await page.context().newCDPSession(page);
client.on("Page.screencastFrame", ({ data, metadata, sessionId }) => {
  frames.push({ seconds: metadata.timestamp, data });
  client.send("Page.screencastFrameAck", { sessionId });
});
await client.send("Page.startScreencast", { format: "png" });
await page.locator("[data-times='8']").click();
await page.waitForFunction(() => document.body.dataset.racing === "on");
frames.length = 0;
await page.mouse.move(0, 0);
await page.waitForFunction(() => document.getElementById("rows-on").textContent === "255");
const arrived = frames.length; // with the cache
await page.waitForFunction(() => document.body.dataset.state === "done");
await page.waitForTimeout(500); // the last frame
await client.send("Page.stopScreencast");
await browser.close();

// write the frames
const [begin, end] = [frames[0].seconds, frames.at(-1).seconds];
const slot = ({ seconds }) => Math.floor(((seconds - begin) / (end - begin)) * (RACE / BETWEEN));
const kept = frames.filter((frame, i) => i === 0 || slot(frame) !== slot(frames[i - 1]));
const list = [];
for (const [i, frame] of kept.entries()) {
  await writeFile(`${folder}/frames/${i}.png`, frame.data, "base64");
  const seconds = i === 0 ? BEFORE : kept[i + 1] ? (slot(kept[i + 1]) - slot(frame)) * BETWEEN : AFTER;
  list.push(`file 'frames/${i}.png'`, `duration ${seconds}`);
}
list.push(`file 'frames/${kept.length - 1}.png'`);
await writeFile(`${folder}/page.png`, frames[arrived].data, "base64");
await writeFile(`${folder}/frames.txt`, list.join("\n"));
const inputs = ["-y", "-loglevel", "error", "-f", "concat", "-i", `${folder}/frames.txt`, "-fps_mode", "vfr"];
const colours = "split[a][b];[a]palettegen=max_colors=96:stats_mode=diff[p];[b][p]paletteuse=dither=none";
execFileSync("ffmpeg", [...inputs, "-filter_complex", colours, `${folder}/page.gif`], { stdio: "inherit" });
